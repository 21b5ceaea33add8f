"""HTTP: the public port that validators use, and the operator's port.

A validator's request passes `limits` (sizes and times, on the socket), `middleware` (how many at once),
its signed route (who is calling, the body as a model, the reply) and its endpoint in `subnet`.
"""
