#!/bin/sh
# Starts this machine's part and keeps it running; Ctrl-C stops it. FL_BN: where fl-bn is, if its environment is not active.
cd "$(dirname "$0")" && exec "${FL_BN:-fl-bn}" start . "$@"
