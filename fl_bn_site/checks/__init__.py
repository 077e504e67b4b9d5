"""What ``fl-bn doctor`` looks at: one small function per check, each of which answers with a ``Finding``."""
