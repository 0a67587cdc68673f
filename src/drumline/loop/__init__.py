"""The loop as a library: measure, profile, plan, verify, train, simulate, report. Values in, values out; no printing.

Each verb is one file with one public function of the same name, exported as `drumline.plan` and so on.
"""
