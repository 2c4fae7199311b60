#!/usr/bin/env bash
# Runs this bundle, exactly as it stands, with the rlplan of the active environment.
set -euo pipefail
exec rlplan run "$(dirname "$0")" "$@"
