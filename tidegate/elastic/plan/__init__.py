"""Plans which bytes go from which rank to which: layouts, parameters and plans as frozen values. Pure: no torch, no
I/O.
"""
