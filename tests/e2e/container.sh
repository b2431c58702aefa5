# Runs a command as a container would: on a read-only root, with volumes, as a user that no file knows.
# usage: container.sh ROOT USER [SOURCE:TARGET:ro|rw ...] -- COMMAND...
set -eu
root=$1
user=$2
shift 2
mount -t tmpfs -o mode=755 root "$root"
for top in /*; do
    if [ -L "$top" ]; then
        cp -P "$top" "$root/"
    elif [ -d "$top" ] && [ "$top" != /tmp ]; then
        mkdir "$root$top"
        mount --rbind "$top" "$root$top"
        case $top in
        /dev | /proc | /sys) ;;
        *) mount -o remount,bind,ro "$root$top" ;;
        esac
    fi
done
while [ "$1" != -- ]; do
    source=${1%%:*}
    rest=${1#*:}
    target=$root${rest%%:*}
    if [ -d "$source" ]; then mkdir -p "$target"; fi
    mount --bind "$source" "$target"
    if [ "${rest#*:}" = ro ]; then mount -o remount,bind,ro "$target"; fi
    shift
done
shift
mkdir "$root/.old"
mount -o remount,bind,ro "$root"
cd "$root"
pivot_root . .old
umount -l /.old
exec unshare --user --map-user="$user" --map-group="$user" "$@"
