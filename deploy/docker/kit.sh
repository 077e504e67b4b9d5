#!/bin/sh
# Makes the kit of docker-compose.yml once, and puts each part into the volume of the one who may read it:
#
#   /kit/authority       ca.key, mounted by nobody else: needed only to renew
#   /kit/server          the SuperLink's and the ServerApp's
#   /kit/sites/SITE      one SuperNode's
#
# SITES=site-1,site-2,site-3    the order gives each site its partition-id
# ALSO=                         further names and addresses for the server's certificate, for sites on other machines
# KIT=/kit                      where the volumes are mounted
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

fresh=$(mktemp -d) # a tmpfs: keys are in no other place than the volumes
trap 'rm -rf "$fresh"' EXIT
fl-bn kit create --output "$fresh/kit" --superlink superlink --exchange-host serverapp --sites "$SITES" --also "control${ALSO:+,$ALSO}"
mkdir -p "$fresh/kit/server/results" # where the ServerApp's volume of results is mounted
for site in $sites; do cp -R "$fresh/kit/sites/$site/." "$kit/sites/$site"; done
cp -R "$fresh/kit/authority/." "$kit/authority"
mv "$fresh/kit/server/server.toml" "$fresh"
cp -R "$fresh/kit/server/." "$kit/server"
cp "$fresh/server.toml" "$kit/server/server.toml" # last: it says that all the rest is there
