#!/bin/sh
# podman, on a machine that is itself a container; its own containers see the system's programs and the Python environment
# $FAKE_PYTHON. $FAKE_IMAGES/builds gets a line for each image that is built.
set -e
case "$1" in
build) echo "$4" >>"$FAKE_IMAGES/builds" ;;
run)
    shift
    base=$("$FAKE_PYTHON/bin/python" -c 'import sys; print(sys.base_prefix)')
    set -- --runtime runc run --cgroupns host -v /sys:/sys:ro -v /sys/fs/cgroup:/sys/fs/cgroup:ro \
        --ulimit nofile=1024:1024 --ulimit nproc=4096:4096 --network host \
        -v /usr:/usr:ro -v /bin:/bin:ro -v /lib:/lib:ro -v /lib64:/lib64:ro -v /etc:/etc:ro \
        -v "$FAKE_PYTHON:$FAKE_PYTHON:ro" -v "$base/bin:$base/bin:ro" -v "$base/lib:$base/lib:ro" "$@"
    ;;
esac
exec podman "$@"
