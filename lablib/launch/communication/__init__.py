"""A cluster of two hosts on one machine, in network namespaces with slow links between them, and what is measured there.

    cluster     the hosts and their links, and ranks on them
    study       all measurements of lab 10
    link        exchanges across the link, and data parallelism that sends fewer bytes
    cluster_rank   the program that each rank of the cluster runs

Read `study` first. Chapter 10.
"""

from lablib.launch.communication.study import network_study

__all__ = ["network_study"]
