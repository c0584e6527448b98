"""The failure zoo: small jobs with one planted fault each, and healthy twins.

Read `job` first, then `zoo`: the lines under `if faulty` are the faults. Chapter 11.
"""

from lablib.launch.failures.job import Setting
from lablib.launch.failures.zoo import FAULTS, HEALTHY, Symptoms, run_programs

__all__ = ["FAULTS", "HEALTHY", "Setting", "Symptoms", "run_programs"]
