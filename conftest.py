"""Every test and docstring example runs on eight simulated devices."""

import multitower as mt

mt.configure(simulated_devices=8)
