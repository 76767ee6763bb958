#!/usr/bin/env bash
# A bare Debian 12 in a folder, with Rust and nothing else: shows that the README's commands do all the set-up.
#
#   bare.sh make ROOT                      debootstrap --variant=minbase into ROOT, which must not exist yet
#   bare.sh run ROOT [OPTION...] COMMAND...
#                                          runs COMMAND inside, in a fresh clone of this tree's HEAD at /convoke;
#                                          its exit code is COMMAND's
#     --user         as the ordinary user `builder`, who has no sudo; else as root
#     --no-network   with loopback only; the crates are fetched before, and cargo is told to be offline
#     --again        in the clone of the run before, with what was built there
#   bare.sh remove ROOT
#
# What a command installs stays in ROOT for the next one; `cp -a ROOT ROOT2` keeps a state. The folders of Cargo's
# downloads are below ROOT too, one for each user. Rust is this machine's toolchain, bound in read-only.
# Each run has its own mounts, processes and host name, and they end with it; nothing of this machine is
# changed outside ROOT, except that `make` installs debootstrap if it is missing. The network is this machine's.
# Needs root, git, util-linux, and iproute2 for --no-network.
set -euo pipefail

TREE=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
SELF=$TREE/launcher-tests/testbed/bare.sh
RELEASE=bookworm
USER_NAME=builder
# Written last by `make`: without it nothing is run or removed.
MARK=etc/convoke-bare
# The certificates that this machine trusts; only for what must come before ca-certificates is installed.
CERTIFICATES=opt/certificates.crt

say() { echo "bare: $*" >&2; }
die() { say "$*"; exit 1; }
wrong() { say "$*"; sed -n '2,/^set -e/{/^set -e/!s/^# \{0,1\}//p}' "$SELF" >&2; exit 2; }

find_root() { # ROOT
  [ -e "$1/$MARK" ] || die "$1 is no root made by bare.sh: bare.sh make $1"
  ROOT=$(realpath "$1")
  [ "$ROOT" != / ] || die "this is the root of this machine, not one to be tried things in"
}

# --- make --------------------------------------------------------------------------------------------

# URI and suite of Debian's packages, as this machine has them: a line for each.
sources() {
  # shellcheck disable=SC2016  # for apt-get to expand
  apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' \
    | sed -n "s/^\([^ ]*\) \($RELEASE\|$RELEASE-updates\|$RELEASE-security\) main$/\1 \2/p" | sort -u
}

make_root() {
  local mirror proxy
  [ $# = 1 ] || wrong "make takes the folder"
  [ ! -e "$1" ] || die "$1 is there already: bare.sh remove $1, or take another folder"
  command -v apt-get > /dev/null || die "no apt-get here: this makes a Debian on a Debian"
  if ! command -v debootstrap > /dev/null; then
    say "installing debootstrap on this machine"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends debootstrap < /dev/null
  fi
  mirror=$(sources | sed -n "s/ $RELEASE$//p" | head -n 1)
  mirror=${mirror:-http://deb.debian.org/debian}
  proxy=$(apt-config shell proxy Acquire::http::Proxy)
  eval "$proxy" # proxy='...', quoted by apt-config
  if [ -n "${proxy:-}" ]; then export http_proxy=$proxy; fi
  mkdir -p "$1"
  ROOT=$(realpath "$1")
  say "debootstrap from $mirror into $ROOT"
  debootstrap --variant=minbase "$RELEASE" "$ROOT" "$mirror" \
    || die "debootstrap failed, see above and $ROOT/debootstrap/debootstrap.log; then rm -rf $ROOT"

  sources | sed 's/^/deb /; s/$/ main/' > "$ROOT/etc/apt/sources.list"
  [ -s "$ROOT/etc/apt/sources.list" ] || echo "deb $mirror $RELEASE main" > "$ROOT/etc/apt/sources.list"
  # How this machine reaches packages: proxies, and whether the clock can be trusted.
  apt-config dump | grep -E '^Acquire::(http|https)::[^ ]* "|^Acquire::(Retries|Check-Valid-Until|Check-Date|ForceIPv4) ' \
    > "$ROOT/etc/apt/apt.conf.d/90machine" || true
  if [ -e /etc/ssl/certs/ca-certificates.crt ]; then
    cp /etc/ssl/certs/ca-certificates.crt "$ROOT/$CERTIFICATES"
    echo "Acquire::https::CaInfo \"/$CERTIFICATES\";" >> "$ROOT/etc/apt/apt.conf.d/90machine"
  fi
  # Those that this machine trusts beside Debian's; the package ca-certificates takes them up.
  mkdir -p "$ROOT/usr/local/share/ca-certificates"
  cp /usr/local/share/ca-certificates/*.crt "$ROOT/usr/local/share/ca-certificates/" 2> /dev/null || true
  # Packages start no daemons, as in a container.
  printf '#!/bin/sh\nexit 101\n' > "$ROOT/usr/sbin/policy-rc.d"
  chmod +x "$ROOT/usr/sbin/policy-rc.d"
  echo bare > "$ROOT/etc/hostname"
  printf '127.0.0.1 localhost\n127.0.1.1 bare\n::1 localhost\n' > "$ROOT/etc/hosts"
  chroot "$ROOT" useradd --create-home --shell /bin/bash "$USER_NAME"
  mkdir -p "$ROOT/opt/rust"
  echo "made by bare.sh from $mirror" > "$ROOT/$MARK"
  say "$ROOT is made: $(du -sh "$ROOT" | cut -f 1)"
}

remove_root() {
  [ $# = 1 ] || wrong "remove takes the folder"
  find_root "$1"
  lock
  rm -rf --one-file-system "$ROOT"
}

# --- run ---------------------------------------------------------------------------------------------

# One run at a time in a root.
lock() {
  exec 9> "$ROOT/.lock"
  flock -n 9 || die "another bare.sh works in $ROOT: wait for it, or take another root"
}

clone() { # OWNER
  rm -rf --one-file-system "$ROOT/convoke"
  git clone --quiet --no-hardlinks "$TREE" "$ROOT/convoke"
  git -C "$ROOT/convoke" checkout --quiet --detach "$(git -C "$TREE" rev-parse HEAD)"
  git -C "$ROOT/convoke" remote remove origin
  chroot "$ROOT" chown -R "$1:$1" /convoke
}

# Runs a command in namespaces of its own and passes on its exit code. A signal to this script ends all in there.
enter() { # NETWORK OWNER VARIABLES... -- COMMAND...
  local namespaces=(--mount --propagation private --pid --fork --kill-child --uts --ipc) pid code=0
  [ "$1" = yes ] || namespaces+=(--net)
  # In the background, so that a signal need not wait for it.
  unshare "${namespaces[@]}" "$SELF" inside "$ROOT" "$RUST" "$@" <&0 &
  pid=$!
  # shellcheck disable=SC2064  # the number of now
  trap "kill -KILL $pid 2> /dev/null; exit 143" INT TERM HUP
  wait $pid || code=$?
  trap - INT TERM HUP
  return $code
}

run() {
  local owner=root network=yes again=no code=0 home cargo_home file variables=()
  [ $# -ge 1 ] || wrong "run takes the folder and a command"
  find_root "$1"
  shift
  while [ $# -gt 0 ]; do
    case $1 in
      --user) owner=$USER_NAME ;;
      --no-network) network=no ;;
      --again) again=yes ;;
      --) shift; break ;;
      -*) wrong "unknown option: $1" ;;
      *) break ;;
    esac
    shift
  done
  [ $# -gt 0 ] || wrong "run takes a command"
  RUST=$(cd "$TREE" && rustc --print sysroot) || die "no rustc here: install Rust (https://rustup.rs)"
  [ -x "$RUST/bin/cargo" ] && [ "$RUST" != /usr ] || die "$RUST is no folder of Rust alone; use one of rustup's toolchains"
  lock

  home=$(chroot "$ROOT" sh -c "echo ~$owner")
  cargo_home=$ROOT$home/.cargo
  mkdir -p "$cargo_home"
  # Where this machine gets crates from, if it says so.
  for file in config.toml config; do
    if [ -e "${CARGO_HOME:-$HOME/.cargo}/$file" ]; then cp "${CARGO_HOME:-$HOME/.cargo}/$file" "$cargo_home/"; fi
  done
  chroot "$ROOT" chown -R "$owner:$owner" "$home/.cargo"
  cp --remove-destination /etc/resolv.conf "$ROOT/etc/resolv.conf"
  if [ $again = no ]; then
    clone "$owner"
  elif [ ! -e "$ROOT/convoke" ]; then
    die "--again: there is no clone in $ROOT yet; leave --again out"
  elif [ "$(stat -c %u "$ROOT/convoke")" != "$(chroot "$ROOT" id -u "$owner")" ]; then
    chroot "$ROOT" chown -R "$owner:$owner" /convoke
  fi

  variables=("HOME=$home" "CARGO_HOME=$home/.cargo" "USER=$owner" "LOGNAME=$owner" "TERM=${TERM:-dumb}" LANG=C.UTF-8
    "PATH=/opt/rust/bin:/usr/local/bin:/usr/bin:/bin")
  [ $owner != root ] || variables[-1]=PATH=/opt/rust/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
  for file in http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY PIP_INDEX_URL PIP_DEFAULT_TIMEOUT; do
    if [ -n "${!file:-}" ]; then variables+=("$file=${!file}"); fi
  done
  if [ -n "${PIP_CERT:-}" ]; then variables+=(PIP_CERT=/etc/ssl/certs/ca-certificates.crt); fi

  if [ $network = no ]; then
    say "fetching the crates, before the network is taken away"
    enter yes "$owner" "${variables[@]}" "CARGO_HTTP_CAINFO=/$CERTIFICATES" -- cargo fetch --locked --quiet \
      || die "cargo fetch failed inside, see above"
    variables+=(CARGO_NET_OFFLINE=true)
  fi
  enter $network "$owner" "${variables[@]}" -- "$@" || code=$?
  return $code
}

# The first process of the namespaces: makes this file system the root's, and waits for the command there. Orphans
# become its children, as they would init's.
inside() { # ROOT RUST NETWORK OWNER VARIABLES... -- COMMAND...
  local root=$1 rust=$2 network=$3 owner=$4 variables=() device
  shift 4
  while [ "$1" != -- ]; do variables+=("$1"); shift; done
  shift
  [ "$network" = yes ] || ip link set lo up
  hostname bare

  mount --bind "$root" "$root"
  cd "$root"
  mount --bind "$rust" opt/rust
  mount -o remount,bind,ro opt/rust
  mount -t proc proc proc
  mount -t sysfs -o ro sysfs sys
  mount -t tmpfs -o mode=755 tmpfs dev
  for device in null zero full random urandom tty; do
    touch "dev/$device"
    mount --bind "/dev/$device" "dev/$device"
  done
  mkdir dev/pts dev/shm dev/net
  # For tests that make networks of their own.
  if [ -c /dev/net/tun ]; then touch dev/net/tun; mount --bind /dev/net/tun dev/net/tun; fi
  mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts dev/pts
  ln -s pts/ptmx dev/ptmx
  mount -t tmpfs -o mode=1777 tmpfs dev/shm
  ln -s /proc/self/fd dev/fd
  ln -s /proc/self/fd/0 dev/stdin
  ln -s /proc/self/fd/1 dev/stdout
  ln -s /proc/self/fd/2 dev/stderr
  mount -t tmpfs -o mode=755 tmpfs run
  # Not chroot, in which nobody may make user namespaces.
  mkdir -p .machine
  pivot_root . .machine
  cd /
  umount -l /.machine
  hash -r
  rmdir /.machine

  # Signals as a terminal gives them: a command in the background of a script ignores some.
  cd /convoke
  setpriv --reuid="$owner" --regid="$owner" --init-groups env -i --default-signal "${variables[@]}" "$@" 9>&-
}

[ "$(id -u)" = 0 ] || die "please run it as root: it makes file systems and mounts"
action=${1:-}
[ $# = 0 ] || shift
case $action in
  make) make_root "$@" ;;
  run) run "$@" ;;
  remove) remove_root "$@" ;;
  inside) inside "$@" ;;
  "") wrong "what shall be done?" ;;
  *) wrong "unknown action: $action" ;;
esac
