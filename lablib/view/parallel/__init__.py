"""Figures of the ways to split a model: the modules have the names of `lablib.calc.parallel`.

    data      replicas, buckets and what they wait for          chapter 02
    tensor    heads on ranks, what a rank keeps                 chapter 03
    zero      shards by stage, seconds by stage                 chapter 05
    fsdp      units, and what is gathered when                  chapter 06
    context   the mask cut among ranks, the ring over time      chapter 12
    experts   tokens to experts and back, load of the experts   chapter 13

Read `data` first.
"""
