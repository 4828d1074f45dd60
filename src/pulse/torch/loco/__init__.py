"""PULSELoCo: several trainers train one model and exchange only what its view would show; the rest waits in error feedback.

One round, on every rank: s = E + (A - L), the part of s that the gate lets through goes out, E keeps the rest, the mean over the ranks
moves the anchor A by an outer optimizer, and L := A. `rounds` has the arithmetic, without any communication; `meeting` what ranks decide
together; `outer` the object that a training loop holds.
"""
