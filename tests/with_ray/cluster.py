"""A Ray cluster of two nodes on this machine: `python cluster.py`, in the environment with Ray.

Prints its address. Lines of stdin are commands, each answered with a line: `add` adds a node, `remove` removes the last
one without notice. It ends with its stdin.
"""

import os
import sys

from ray.cluster_utils import Cluster

NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}


def main() -> None:
    os.makedirs(os.path.join(os.environ["RAY_TMPDIR"], "ray"), exist_ok=True)  # where Ray leaves the address
    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    nodes = [cluster.add_node(**NODE)]
    print(cluster.address, flush=True)
    try:
        for line in sys.stdin:
            if line.strip() == "add":
                nodes.append(cluster.add_node(**NODE))
            else:
                cluster.remove_node(nodes.pop(), allow_graceful=False)
            print(line.strip(), flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
