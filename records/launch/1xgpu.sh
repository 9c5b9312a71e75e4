#!/bin/sh
# A record on one GPU. record.sh has the variables:
#   BY="Your Name" RATE=2.49 SETTINGS="ngram_rows=22675456 steps=1250" \
#     bash records/launch/1xgpu.sh
exec bash "$(dirname "$0")/record.sh" 1xgpu
