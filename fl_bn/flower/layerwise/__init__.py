"""Run the layer-wise exchange (FedTAN) over Flower."""
