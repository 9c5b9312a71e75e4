#!/bin/sh
# A record on a TPU v6e-8. record.sh has the variables:
#   BY="Your Name" bash records/launch/v6e-8.sh
exec bash "$(dirname "$0")/record.sh" v6e-8
