#!/bin/sh
# setup.sh TYPE [TEMPLATE]: lays out PENSTOCK_HOME, where flow runs read configs and leave results,
# makes the pool `penstock` of that type, and deploys every flow. Repeated after every upgrade;
# configs stay as they are, and so does the pool, but for its template.
set -eu
share=${PENSTOCK_SHARE:-/usr/share/penstock}
cd "$PENSTOCK_HOME"
# A link, so that all that run from this folder run the flows of their own image.
[ "$share/flows" -ef flows ] || ln -sfn "$share/flows" flows
[ -e configs ] || cp -R "$share/configs" configs
if ! prefect work-pool inspect penstock >/dev/null 2>&1; then
    prefect work-pool create penstock --type "$1" ${2:+--base-job-template "$2"}
elif [ -n "${2:-}" ]; then
    prefect work-pool update penstock --base-job-template "$2"
fi
prefect --no-prompt deploy --all --prefect-file "$share/prefect.yaml"
