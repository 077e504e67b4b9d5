#!/bin/sh
# Makes, without an image registry, the image that the Dockerfile names in its FROM line, from Debian's packages.
#
#   sh tools/deployment/base_image.sh            # as root, with debootstrap, a Docker engine and a Debian mirror; once, 10 minutes
#
# The Dockerfile stays what a user with a registry builds. Two things differ in the stand-in: Python is Debian's 3.11, and the wheels that
# constraints.txt names lie in /wheels with an /etc/pip.conf that points pip there, because a build container may have no way out to a package index.
#
# PYTHON=python3.11   which host Python resolves and fetches the wheels (must be 3.11)
# MIRROR=             Debian mirror, if not debootstrap's own default
set -eu

root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3.11}
tag=$(sed -n 's/^ARG BASE=//p' "$root/deploy/docker/Dockerfile")
[ -n "$tag" ] || { echo "deploy/docker/Dockerfile has no line 'ARG BASE=image:tag': which image is wanted?" >&2; exit 1; }
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo "$python is not Python 3.11: set PYTHON" >&2; exit 1; }
if docker image inspect "$tag" >/dev/null 2>&1; then echo "$tag is there already"; exit 0; fi

work=$(mktemp -d -p "${TMPDIR:-/var/tmp}")
trap 'rm -rf "$work"' EXIT
trap 'exit 1' INT TERM
rootfs=$work/rootfs

echo "wheels ..."
mkdir -p "$work/project"
(cd "$root" && cp -r pyproject.toml setup.py README.md LICENSE fl_bn fl_bn_site server_app client_app "$work/project")  # a build leaves its folders in the copy
"$python" -m pip wheel --quiet --no-cache-dir --constraint "$root/constraints.txt" --wheel-dir "$work/wheels" "$work/project[deployment,report,vision]"
"$python" -m pip wheel --quiet --no-cache-dir --wheel-dir "$work/wheels" "setuptools>=77" # what the project is built with
rm -f "$work"/wheels/fl_bn-*.whl

echo "root file system ..."
debootstrap --variant=minbase --include=python3.11,python3-venv,python3-pip,ca-certificates bookworm "$rootfs" ${MIRROR:+"$MIRROR"} >"$work/log" 2>&1 ||
    { tail -20 "$work/log" >&2; exit 1; }
rm -rf "$rootfs"/var/cache/apt/archives/*.deb "$rootfs"/var/lib/apt/lists/* "$rootfs"/usr/lib/python3*/EXTERNALLY-MANAGED
for name in python python3; do ln -sf /usr/bin/python3.11 "$rootfs/usr/local/bin/$name"; done
for name in pip pip3; do ln -sf /usr/bin/pip3 "$rootfs/usr/local/bin/$name"; done
mv "$work/wheels" "$rootfs/wheels"
printf '[global]\nno-index = true\nfind-links = /wheels\n' >"$rootfs/etc/pip.conf"

echo "image ..."
tar -C "$rootfs" --numeric-owner -c . | docker import \
    --change 'ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin' --change 'ENV LANG=C.UTF-8' --change 'CMD ["python3"]' \
    --message "stand-in made by tools/deployment/base_image.sh" - "$tag"
