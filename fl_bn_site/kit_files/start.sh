#!/bin/sh
# Start the programs of this machine and keep them running until Ctrl-C.
# If the environment of fl-bn is not active, set FL_BN to the path of the program fl-bn.
cd "$(dirname "$0")" && exec "${FL_BN:-fl-bn}" start . "$@"
