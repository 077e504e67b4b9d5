"""The page's HTML, for jinja2 with autoescape on: every label, error and note is somebody's text."""

PARTS = """
{% macro table(report) %}
{% set layout = report.layout %}
<div class="wide" tabindex="0" role="region" aria-label="Table of results">
<table class="sortable" aria-describedby="{{ report.id }}caption">
<thead>
{% if layout.rest %}
<tr><td></td><th class="of" scope="colgroup" colspan="{{ layout.columns|length }}">{{ layout.rest|join(", ") }}</th></tr>
{% endif %}
<tr><th scope="col">{{ layout.row_axis or "run" }}</th>
{% for column in layout.columns %}
<th scope="col">{{ column }}</th>
{% endfor %}
</tr>
</thead>
<tbody>
{% for line in report.lines %}
<tr><th scope="row">{{ line.row }}</th>
{% for cell in line.cells %}
<td data-value="{{ cell.value }}">
{%- if cell.best %}<strong>{{ cell.mean }}</strong>
{%- elif cell.value %}{{ cell.mean }}
{%- else %}<span class="{{ cell.kind }}">{{ cell.mean }}</span>
{%- endif %}
{%- if cell.std %} <span class="std">{{ cell.std }}</span>{% endif %}
{%- if cell.count %} <span class="count">{{ cell.count }}</span>{% endif %}
{%- if cell.paper %} <span class="paper">[{{ cell.paper }}]</span>{% endif %}
</td>
{% endfor %}
</tr>
{% endfor %}
</tbody>
</table>
</div>
<p class="meta" id="{{ report.id }}caption">{{ report.table.caption }}{% if report.table.best %} Bold: the best of a column.{% endif %}</p>
{% endmacro %}

{% macro figures(report) %}
{% for one in report.figures %}<figure id="{{ report.id }}{{ one.name }}">
<div class="wide" tabindex="0" role="region" aria-label="{{ one.name }}">{{ one.svg }}</div>
<figcaption>{{ one.caption }}</figcaption>
</figure>
{% endfor %}{% endmacro %}

{% macro paper(report) %}
{% set paper = report.settings.paper %}
{% if paper.source %}<p>The paper's numbers are from {{ paper.source }}.</p>{% endif %}
{% if paper.note %}<p class="notes">{{ paper.note }}</p>{% endif %}
{% if report.table.elsewhere %}
<p>Numbers of the paper that have no place in the table: {{ report.table.elsewhere|join("; ") }}.</p>
{% endif %}
{% endmacro %}

{% macro compared(rows) %}
{% if rows %}<div class="wide" tabindex="0" role="region" aria-label="Comparisons">
<table class="text compared"><thead><tr>
{% for name in ("comparison", "difference (95 % interval)", "the paper's", "detectable", "seeds", "p", "") -%}
<th scope="col">{{ name }}</th>{% endfor %}</tr></thead>
<tbody>{% for row in rows %}<tr>{% for value in row -%}
{% if loop.first %}<th scope="row">{{ value }}</th>{% else %}<td>{{ value }}</td>{% endif %}{% endfor %}</tr>
{% endfor %}</tbody></table></div>{% endif %}
{% endmacro %}

{% macro verdict(statement) %}
<section aria-labelledby="verdict"><h2 id="verdict">Verdict</h2>
<p>{{ statement.claim }}. {{ statement.paper }}.</p>
<p><strong>Verdict:</strong> {{ statement.verdict }}</p>
{% for title, text in statement.words %}<p>{{ title }}: {{ text }}</p>
{% endfor %}
{{ compared(statement.compared) }}
<p class="meta">Differences in points, paired by seed: a two-sided t-test. Detectable: the smallest true difference that it would find in
four of five such experiments.</p>
</section>
{% if statement.whys %}<section aria-labelledby="why"><h2 id="why">Why</h2>
{% for one in statement.whys %}<p><strong>{{ one.asks }}</strong> {{ one.says }}</p>
{{ compared(one.compared) }}
{% endfor %}</section>{% endif %}
{% endmacro %}

{% macro program(one) %}
{% if one.notes %}<p class="notes">{{ one.notes }}</p>{% endif %}
{% for name, picture, least in one.pictures %}<figure>
<div class="wide" tabindex="0" role="region" aria-label="{{ name }}">
<img src="data:image/png;base64,{{ picture }}" alt="{{ name }}"
 style="min-width: {{ least }}px; max-width: max(100%, {{ least }}px); background: white">
</div>
<figcaption>{{ name }}</figcaption>
</figure>
{% endfor %}
{% for table in one.tables %}<details{{ " open" if table.count <= 40 }}><summary>{{ table.name }}</summary>
<div class="wide" tabindex="0" role="region" aria-label="{{ table.name }}">
<table><thead><tr>{% for name in table.columns %}<th scope="col">{{ name }}</th>{% endfor %}</tr></thead>
<tbody>{% for row in table.rows %}<tr>{% for value in row %}<td>{{ value }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div>
{% if table.count > table.rows|length %}<p class="meta">The first {{ table.rows|length }} of {{ table.count }} lines.</p>{% endif %}
</details>{% endfor %}
{% endmacro %}

{% macro problems(report) %}
<div class="wide" tabindex="0" role="region" aria-label="Runs that are not in the numbers">
<table class="text"><thead><tr><th scope="col">run</th><th scope="col">where</th><th scope="col">what happened</th></tr></thead>
<tbody>
{% for one in report.problems %}
<tr><th scope="row">{{ one.name }}</th><td>{{ one.where }}</td><td><pre class="error">{{ one.why }}</pre></td></tr>
{% endfor %}
</tbody></table>
</div>
{% endmacro %}
"""

HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:;
 script-src 'sha256-{{ hash }}'; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{ title }}</title>
<style>{{ css }}</style>
</head>
<body>
"""

FOOT = """
<script>{{ script }}</script>
</body>
</html>
"""

REPORT = (
    PARTS
    + HEAD
    + """
<header>
<h1>{{ title }}</h1>
{% if not statement %}<p class="meta">{{ report.state }}</p>{% endif %}
{% if report.settings.notes %}<p class="notes">{{ report.settings.notes }}</p>{% endif %}
<nav aria-label="Contents"><ul>{% for id, name in contents %}<li><a href="#{{ id }}">{{ name }}</a></li>{% endfor %}</ul></nav>
</header>
<main>
{% if statement %}{{ verdict(statement) }}{% endif %}
<section aria-labelledby="results"><h2 id="results">Results</h2>
{{ table(report) }}
{{ paper(report) }}
</section>
{% if report.pictures %}<section aria-labelledby="figures"><h2 id="figures">Figures</h2>
{{ figures(report) }}</section>{% endif %}
{% if report.problems %}<section aria-labelledby="problems"><h2 id="problems">Runs that are not in the numbers</h2>
{{ problems(report) }}</section>{% endif %}
<section aria-labelledby="settings"><h2 id="settings">Settings</h2>
{% set differing = report.differing %}
{% if differing.keys %}<details{{ " open" if differing.lines|length <= 12 }}><summary>In which the runs differ</summary>
<div class="wide" tabindex="0" role="region" aria-label="Settings in which the runs differ">
<table class="text"><thead><tr>
{% for name in differing.axes + differing.keys %}
<th scope="col">{{ name }}</th>
{% endfor %}
</tr></thead>
<tbody>
{% for where, values in differing.lines %}
<tr>
{% for value in where + values %}
{% if loop.first %}<th scope="row">{{ value }}</th>{% else %}<td>{{ value }}</td>{% endif %}
{% endfor %}
</tr>
{% endfor %}
</tbody></table>
</div></details>{% endif %}
{% if report.common %}<details open><summary>Common to all {{ report.count }} runs</summary>
<div class="wide" tabindex="0" role="region" aria-label="Settings common to all runs">
<table class="text"><tbody>{% for key, value in report.common %}<tr><th scope="row">{{ key }}</th><td>{{ value }}</td></tr>
{% endfor %}</tbody></table></div></details>{% endif %}
{% if report.environment %}<details><summary>Machine and versions</summary>
<div class="wide" tabindex="0" role="region" aria-label="Machine and versions">
<table class="text"><tbody>{% for key, value in report.environment %}<tr><th scope="row">{{ key }}</th><td>{{ value }}</td></tr>
{% endfor %}</tbody></table></div></details>{% endif %}
</section>
<section aria-labelledby="again"><h2 id="again">To do it again</h2>
<pre><code>{{ (statement or report).commands|join("\n") }}</code></pre>
<details><summary>sweep.toml</summary><pre><code>{{ report.settings.text }}</code></pre></details>
</section>
</main>
"""
    + FOOT
)

PROGRAM = (
    PARTS
    + HEAD
    + """
<header><h1>{{ title }}</h1></header>
<main>
{{ program(one) }}
<section aria-labelledby="again"><h2 id="again">The experiment's file</h2><pre><code>{{ one.text }}</code></pre></section>
</main>
"""
    + FOOT
)

INDEX = (
    PARTS
    + HEAD
    + """
<header>
<h1>{{ title }}</h1>
<nav aria-label="Contents"><ul>{% for one in reports %}<li><a href="#{{ one.id }}">{{ one.title }}</a></li>{% endfor %}</ul></nav>
</header>
<main>
{% for one in reports %}<section class="experiment" aria-labelledby="{{ one.id }}">
<h2 id="{{ one.id }}">{{ one.title }}</h2>
{% if one.report %}
<p class="meta">{{ one.report.state }}{% if one.link %} <a href="{{ one.link }}">The whole report</a>.{% endif %}</p>
{% if one.report.settings.notes %}<p class="notes">{{ one.report.settings.notes }}</p>{% endif %}
{{ table(one.report) }}
{{ paper(one.report) }}
{{ figures(one.report) }}
{% if one.report.problems %}<details><summary>{{ one.report.problems|length }} runs are not in the numbers</summary>
{{ problems(one.report) }}</details>{% endif %}
{% elif one.program %}
{% if one.link %}<p class="meta"><a href="{{ one.link }}">The whole report</a>.</p>{% endif %}
{{ program(one.program) }}
{% else %}<p class="none">There is no report: {{ one.error }}</p>{% endif %}
</section>
{% endfor %}</main>
"""
    + FOOT
)
