#!/bin/sh
# Submits a run and shows its log: ./run.sh --run-config "method='hbn' rounds=40"
cd "$(dirname "$0")" && exec "${FL_BN:-fl-bn}" submit . "$@"
