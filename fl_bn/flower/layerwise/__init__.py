"""Run the layer-wise exchange (FedTAN) over Flower: sessions, carriers (transports), addresses and transcripts."""
