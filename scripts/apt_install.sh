#!/bin/sh
# Installs Debian packages, as root or with sudo.
apt="apt-get"
[ "$(id -u)" = 0 ] || apt="sudo -n apt-get"
{ $apt update -qq && $apt install --yes -qq "$@" >/dev/null; } || {
    echo "needs $*: install it as root"
    exit 1
}
