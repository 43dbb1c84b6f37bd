"""Do the tests notice? `python -m tests.mutants` puts faults into a copy of the package, one at a time, and runs the tests that see them.

Not mutmut or cosmic-ray: they run the whole suite for each fault, or change the checked-out tree; here tests start processes, and importing
torch takes longer than most of them. A coverage map (line -> tests) and a process that forks after the imports: a fault costs seconds.
"""
