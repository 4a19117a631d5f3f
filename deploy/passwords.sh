#!/bin/sh
# (umask 077; sh passwords.sh > deploy/.env): passwords for the database and for Prefect's API, in a file of mode 0600.
set -eu
random() { od -An -N 24 -tx1 /dev/urandom | tr -d ' \n'; }
echo "DATABASE_PASSWORD=$(random)"
echo "PREFECT_API_AUTH_STRING=penstock:$(random)"
