#!/bin/sh
# Make the kit of docker-compose.yml once, and copy each part to the volume of the containers that may read it:
#
#   /kit/authority       ca.key, which no other container mounts; it is needed only to renew certificates
#   /kit/server          for the SuperLink and the ServerApp
#   /kit/sites/SITE      for one SuperNode
#   /kit/submitters      submitter.key, which signs runs: for the service `run`
#
# SITES=site-1,site-2,site-3    the names of the sites; their order gives each its partition-id
# ALSO=                         further names and addresses for the server's certificate, for sites on other machines
# KIT=/kit                      the folder in which the volumes are mounted
set -eu
umask 077
kit=${KIT:-/kit}
sites=$(echo "$SITES" | tr , ' ')

if [ -f "$kit/server/server.toml" ]; then
    for site in $sites; do
        [ -f "$kit/sites/$site/site.key" ] || {
            echo "the server's volume has a kit, but $site's has no key: the volumes are not of one kit." \
                "Remove all of them (docker-compose down --volumes) and start again" >&2
            exit 1
        }
    done
    echo "the kit is there already"
    exit 0
fi

fresh=$(mktemp -d) # a tmpfs, so that keys are written to no disk but the volumes
trap 'rm -rf "$fresh"' EXIT
fl-bn kit create --output "$fresh/kit" --superlink superlink --exchange-host serverapp --sites "$SITES" --also "control${ALSO:+,$ALSO}"
mkdir -p "$fresh/kit/server/results" "$fresh/kit/server/state" # volumes are mounted here
for site in $sites; do cp -R "$fresh/kit/sites/$site/." "$kit/sites/$site"; done
cp -R "$fresh/kit/authority/." "$kit/authority"
mkdir -p "$kit/submitters" && cp -R "$fresh/kit/submitters/." "$kit/submitters"
mv "$fresh/kit/server/server.toml" "$fresh"
cp -R "$fresh/kit/server/." "$kit/server"
cp "$fresh/server.toml" "$kit/server/server.toml" # copied last: it shows that the kit is complete
