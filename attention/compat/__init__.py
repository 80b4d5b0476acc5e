"""The interfaces of two libraries for power attention, over what is here.

    from sympow.attention.compat.power_attention import power_full              # power_attention
    from sympow.attention.compat.retention import power_retention               # retention 1.0, which replaced it

Code written for one of them runs with its import changed, on a CPU and on a GPU. docs/use/library.md says what is the
same and what differs.
"""
