"""Run the layer-wise exchange (FedTAN) over Flower: sessions, carriers, addresses and transcripts."""
