"""What ``fl-bn doctor`` looks at on every machine: packages, memory, clock, the run config, the data and the model."""
