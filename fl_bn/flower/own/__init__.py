"""Use fl-bn in a Flower app of your own: strategies for its server, handlers for its clients."""
