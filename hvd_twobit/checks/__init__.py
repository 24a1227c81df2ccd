"""``hvd-twobit check``: is everything here that training with TwoBit needs, and what to do where it is not.

    results     what a check finds
    steps       how a process tells what it has found so far, so that one that crashes or hangs is a result as well
    probes      the processes that import Horovod and the frameworks
    kernels     the process that compares the kernels with their definition
    self_test   a job of two ranks, and the program of a rank
    simulation  what these ranks have to compute
    judging     the checks: what the processes found, judged
    remedies    what to do
    checking    runs the checks one after the other
    report      prints them
"""
