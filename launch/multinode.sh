#!/bin/sh
# Trains on several hosts: start the same line on each of them.
#
#   PET_NNODES=3 PET_NPROC_PER_NODE=gpu PET_RDZV_ENDPOINT=host1:29400 PET_RDZV_ID=job1 \
#       sh launch/multinode.sh recipe=mobilenet_cifar10 run.dir=/shared/runs/mine
#
# Arguments are those of `python -m ddptrain launch`: torchrun's options, then overrides. The environment is torchrun's:
#   PET_NNODES          how many hosts; <min>:<max> trains on as many as are there, and takes in more
#   PET_RDZV_ENDPOINT   <host>:<port> where they meet: one of them, by a name or address that all can reach
#   PET_RDZV_ID         the job's name, the same on all
#   PET_NPROC_PER_NODE  ranks on this host; PET_MAX_RESTARTS; PET_RDZV_CONF
#   PET_LOCAL_ADDR      this host's address, where the one that the route to the endpoint has is not right
# And: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME (default: the NIC of that address), MULTINODE_WAIT (seconds to wait for
# the endpoint, default 300), PYTHON (default python). docs/hosts.md says what happens when a host is lost.
set -eu

refuse() {
    echo "multinode.sh: $1" >&2
    exit 2
}

[ -n "${PET_NNODES:-}" ] || refuse "PET_NNODES is not set: give the number of hosts, or <min>:<max>."
[ -n "${PET_RDZV_ENDPOINT:-}" ] ||
    refuse "PET_RDZV_ENDPOINT is not set: give <host>:<port> of one of the hosts, the same on all."
[ -n "${PET_RDZV_ID:-}" ] || refuse "PET_RDZV_ID is not set: give the job a name, the same on all hosts."
[ "${PET_RDZV_BACKEND:-c10d}" = c10d ] ||
    refuse "PET_RDZV_BACKEND=$PET_RDZV_BACKEND: this script is for c10d; unset it."

# On stdout: this host's address, the NIC that has it, and whether the endpoint is this host. Waits for the endpoint.
found=$("${PYTHON:-python}" - "$PET_RDZV_ENDPOINT" <<'EOF'
import fcntl, ipaddress, os, socket, struct, sys, time

SIOCGIFADDR = 0x8915


def refuse(message):
    print(f"multinode.sh: {message}", file=sys.stderr)
    sys.exit(2)


def addresses():
    """{NIC: its addresses}."""
    found = {name: [] for _, name in socket.if_nameindex()}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for name in found:
            try:
                reply = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name].append(socket.inet_ntoa(reply[20:24]))
            except OSError:  # it has none
                pass
    try:
        for line in open("/proc/net/if_inet6"):
            number, *_, name = line.split()
            found.setdefault(name, []).append(str(ipaddress.IPv6Address(int(number, 16))))
    except OSError:  # no IPv6
        pass
    return found


def source(address, port):
    """The address from which this host would send to another; None without a route."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))  # sends nothing
            return probe.getsockname()[0]
        except OSError:
            return None


def loopback(address):
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


endpoint, nics, here = sys.argv[1], addresses(), socket.gethostname()
names = ", ".join(sorted(nics))
host, _, port = endpoint.rpartition(":")
host = host.strip("[]")
if not host or not port.isdigit() or not 0 < int(port) < 65536:
    refuse(f"PET_RDZV_ENDPOINT={endpoint}: must be <host>:<port>, with a port from 1 to 65535.")
port = int(port)

for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
    for given in filter(None, os.environ.get(variable, "").split(",")):
        if variable.startswith("NCCL") and given.startswith("^"):
            break  # those not to use
        name = given.lstrip("=").partition(":")[0]
        # NCCL takes the beginning of a name too
        if name not in nics and not (variable.startswith("NCCL") and any(nic.startswith(name) for nic in nics)):
            refuse(f"{variable}={os.environ[variable]}: {here} has no NIC of that name; it has {names}.")

try:
    target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
except socket.gaierror as error:
    refuse(f"PET_RDZV_ENDPOINT={endpoint}: {here} can't resolve {host} ({error.strerror}). Give its address, or"
           " enter it in DNS or /etc/hosts of all hosts.")
own = [address for of_nic in nics.values() for address in of_nic]
is_host = target in own or loopback(target)
if is_host and (host == "localhost" or host == target and loopback(target)) and os.environ["PET_NNODES"] != "1":
    refuse(f"PET_RDZV_ENDPOINT={endpoint}: every host takes that for itself. Give a name or address that all reach.")

local = os.environ.get("PET_LOCAL_ADDR") or source(target, port)
if local is None:
    refuse(f"PET_RDZV_ENDPOINT={endpoint}: {here} has no route to {target}; its NICs: {names}. Is the network up?")
if loopback(local) and "PET_LOCAL_ADDR" not in os.environ:
    # Debian enters a host's own name as 127.0.1.1; that leads nobody here
    local = source("192.0.2.1", port) or next((each for each in own if not loopback(each)), local)
nic = next((name for name, of_nic in nics.items() if local in of_nic), None)
if nic is None:
    refuse(f"PET_LOCAL_ADDR={local}: no NIC of {here} has that address; it has"
           f" {', '.join(each for each in own if not loopback(each)) or 'none'}.")

if is_host:
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", port))
            server.listen(1)
        except OSError as error:
            refuse(f"PET_RDZV_ENDPOINT={endpoint}: port {port} of {here} is not free ({error.strerror}). Another job, or an"
                   " earlier one that has not ended? Choose another port, the same on all hosts.")
else:
    wait, began, said = os.environ.get("MULTINODE_WAIT", "300"), time.monotonic(), False
    if not wait.isdigit():
        refuse(f"MULTINODE_WAIT={wait}: must be a whole number of seconds.")
    while True:
        try:
            socket.create_connection((target, port), timeout=3).close()
            break
        except OSError as error:
            why = (error.strerror or "no answer").lower()
        if time.monotonic() - began > int(wait):
            refuse(f"{endpoint} can't be reached from {here} ({why}), after {wait} s. Refused: the job is not started"
                   f" on {host}. No answer, no route: likely a firewall between them; open port {port} and, among the"
                   " hosts, all others: ranks choose theirs.")
        if not said:
            print(f"multinode.sh: {here} waits for {endpoint}, up to {wait} s ({why})", file=sys.stderr)
            said = True
        time.sleep(1)
print(local, nic, str(is_host).lower())
EOF
) || exit 2
local_addr=${found%% *}
is_host=${found##* }
nic=${found#* }
nic=${nic% *}

export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$nic}"
export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-$nic}"
# torch's warnings on connections that were closed come with forty lines each; the ranks' own messages say it
export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}"
export PET_RDZV_BACKEND=c10d
# without is_host torchrun guesses by the host's name who keeps the rendezvous, and without --local-addr it gives the
# ranks that name to meet at, which others often can't resolve. An elastic job waits 5 s for more hosts, not 30.
export PET_RDZV_CONF="is_host=$is_host,last_call_timeout=5${PET_RDZV_CONF:+,$PET_RDZV_CONF}"
echo "multinode.sh: $(uname -n) is $local_addr on $nic, the hosts meet at $PET_RDZV_ENDPOINT$(
    [ "$is_host" = false ] || echo ' (this one)')" >&2
exec "${PYTHON:-python}" -m ddptrain launch --local-addr="$local_addr" "$@"
