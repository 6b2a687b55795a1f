{% set metrics = {"tfrecords": "validation/loss", "gan": "frechet"} -%}
{% filter replace('"loss", False', '"' ~ metrics.get(cookiecutter.example, "loss") ~ '", False') -%}
{% include "sweeps/optuna.py" %}
{%- endfilter -%}
