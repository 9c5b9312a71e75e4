#!/bin/sh
# A record on eight H100s. record.sh has the variables:
#   BY="Your Name" RATE=24 bash records/launch/8xh100.sh
exec bash "$(dirname "$0")/record.sh" 8xh100
