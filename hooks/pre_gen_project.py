"""Checks the answers once more, while cookiecutter renders this: a replay asks no questions.

{{ cookiecutter | checked }}
"""
