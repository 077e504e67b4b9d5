#!/bin/sh
# Submit a run and show its log, for example: ./run.sh --run-config "method='hbn' rounds=40"
cd "$(dirname "$0")" && exec "${FL_BN:-fl-bn}" submit . "$@"
