"""Define the commands of ``fl-bn``, in one file per group."""
