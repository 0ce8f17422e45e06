"""This package holds the strategies of parties that train in step, and the evaluation of one
state.
"""
