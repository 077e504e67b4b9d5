#!/bin/sh
# Divide the folder of a site between two users: one has the key, the other runs the code that the server sends. As root:
#
#   sh site-users.sh /var/lib/fl-bn/site [KEY_USER [APP_USER]]     # existing users, by name or number; default: fl-bn and fl-bn-app
#
# KEY_USER   owns the folder and reads site.key; its service, the gate, writes to node/ and packages/ only
# APP_USER   reads site.toml, ca.crt and packages/, and writes to state/ and run/ only: it can neither read site.key nor change site.toml
set -eu
[ $# -ge 1 ] && [ -f "$1/site.toml" ] || { echo "usage: $0 FOLDER [KEY_USER [APP_USER]], where FOLDER has a site.toml" >&2; exit 2; }
folder=$1 key=${2:-fl-bn} app=${3:-fl-bn-app}
group=$(id -g "$app" 2>/dev/null || echo "$app")
mkdir -p "$folder/node" "$folder/packages" "$folder/run" "$folder/state"
chown -R "$key:$group" "$folder"
chown -R "$app:$group" "$folder/state"
chmod 0750 "$folder"
find "$folder" -maxdepth 1 -type f -exec grep -q 'PRIVATE KEY' {} \; -exec chmod 0600 {} +
find "$folder" -maxdepth 1 -type f ! -exec grep -q 'PRIVATE KEY' {} \; -exec chmod 0640 {} +
chmod 0750 "$folder/start.sh"
[ ! -d "$folder/submitters" ] || { chmod 0750 "$folder/submitters" && find "$folder/submitters" -type f -exec chmod 0640 {} +; }
chmod 0700 "$folder/node" "$folder/state"
chmod 0750 "$folder/packages"
chmod 0770 "$folder/run"
