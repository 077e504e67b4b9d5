"""Door 3: strategies and handlers for a Flower app of one's own."""
