"""Carry the layer-wise exchange (FedTAN) over Flower: sessions, carriers, addresses, transcripts."""
