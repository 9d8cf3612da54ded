#!/bin/sh
# Leaves a file named after its rank in the folder that it is given.
echo "rank $RANK was here"
: > "$1/$RANK"
