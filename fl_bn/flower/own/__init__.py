"""Join a Flower app of your own to fl-bn: strategies for its server, handlers for its clients."""
