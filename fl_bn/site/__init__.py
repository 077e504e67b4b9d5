"""Running on separate machines: the kit (certificates, keys, one folder per machine), and the commands that start what is in a folder."""
