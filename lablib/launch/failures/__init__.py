"""The failure zoo: small jobs with one planted fault each, and healthy twins.

Read `job` first: the lines under `if fault` are the fault. Chapter 11.
"""

from lablib.launch.failures.job import Setting
from lablib.launch.failures.zoo import FAULTS, HEALTHY, Symptoms, run_programs

__all__ = ["FAULTS", "HEALTHY", "Setting", "Symptoms", "run_programs"]
