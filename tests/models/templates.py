"""Small chat templates with the habits of real ones."""

CHATML = """
{%- if tools %}{{- '<|system|>Tools: ' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|end|>\\n' }}{% endif -%}
{%- for message in messages -%}
  {%- if message.role == 'tool' -%}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|user|>' }}{% endif -%}
    {{ '<result>' + message.content + '</result>' }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|end|>\\n' }}{% endif -%}
  {%- else -%}
    {{ '<|' + message.role + '|>' }}{{ message.content }}
    {%- for call in message.tool_calls or [] -%}
      {{ '<call>' + call.function.name }}{{ call.function.arguments | tojson }}{{ '</call>' }}
    {%- endfor -%}
    {{ '<|end|>\\n' }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif -%}
"""

# The system message in front of the loop, the first question too, behind the tools; trims; a date.
LLAMA = """
{{- '<s>' }}
{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|system|>Today is ' + strftime_now('%H:%M:%S.%f') + '. ' + system + '<|end|>' }}
{%- if tools %}
  {%- set question = messages[0]['content'] | trim %}
  {%- set messages = messages[1:] %}
  {{- '<|user|>Use a tool. ' + question + '<|end|>' }}
{%- endif %}
{%- for message in messages %}
  {{- '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""

# Contents are lists; roles alternate; no generation prompt.
PARTS = """
{{- '<s>' }}
{%- for message in messages %}
  {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate.') }}{% endif %}
  {{- '<|' + message.role + '|>' }}
  {%- for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}
  {{- '<|end|>' }}
{%- endfor %}
"""

BOTH = """
{%- macro say(content) %}
  {%- if content is string %}{{ content }}{% else %}{% for part in content %}{{ part['text'] }}{% endfor %}{% endif %}
{%- endmacro %}
{%- for m in messages %}{{ '<|' ~ m.role ~ '|>' }}{{ say(m.content) }}{{ '<|end|>' }}{% endfor %}
{{- '<|assistant|>' if add_generation_prompt }}
"""

# Messages by number; reasoning of old answers is left out; text captured in blocks.
BY_NUMBER = """
{%- for i in range(messages | length) -%}
  {%- set message = messages[i] -%}
  {%- set body -%}{{ message.content.split('</think>')[-1] }}{%- endset -%}
  {{ '<|' + message.role + '|>' }}{% filter trim %} {{ body }} {% endfilter -%}
  {% generation %}{{ '<|end|>' }}{% endgeneration -%}
{%- endfor -%}
{%- if not add_generation_prompt -%}{%- else %}{{ '<|assistant|>' }}{% endif -%}
"""

# Results stand behind the calls they answer, found by a loop inside the loop; a macro has a loop over messages of its own.
LOOK_AHEAD = """
{%- macro number(messages, id) %}
  {%- for m in messages %}{% for c in m.tool_calls or [] if c.id == id %}{{ loop.index }}{% endfor %}{% endfor %}
{%- endmacro %}
{%- for message in messages %}
  {%- if message.role != 'tool' %}{{ '<|' + message.role + '|>' }}{{ message.content }}{{ '<|end|>' }}{% endif %}
  {%- for call in message.tool_calls or [] %}{{ '<call ' + number(messages, call.id) + '>' }}{% endfor %}
  {%- if message.tool_calls %}
    {%- for other in messages[loop.index:] if other.role == 'tool' %}{{ '<result>' + other.content + '</result>' -}}
    {%- endfor %}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""

DOCUMENTS = """
{%- for d in documents or [] %}{{ '<doc ' + d.doc_id + ' ' + d.title + '>' + d['text'] + '</doc>' }}{% endfor %}
{%- for message in messages %}{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}{% endfor %}
"""

DOCUMENTS_AS_JSON = """
{%- for document in documents or [] %}{{ document | tojson }}{% endfor %}
{%- for message in messages %}{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}{% endfor %}
"""

# Nothing of it can be told apart: written at once, in the end.
COLLECTED = """
{%- set ns = namespace(out='') %}
{%- for m in messages %}{% set ns.out = ns.out + '<|' + m.role + '|>' + m.content + '<|end|>' %}{% endfor %}
{{- ns.out }}
"""

BACKWARDS = "{% for message in messages[::-1] %}{{ '<|' + message.role + '|>' + message.content }}{% endfor %}"

SHOUTING = "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content | upper }}{% endfor %}"

FORGETFUL = "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content[:5] }}{% endfor %}"

ARGUMENTS_AS_TEXT = """
{%- for m in messages %}{{ '<|' + m.role + '|>' + m.content }}
  {%- for call in m.tool_calls or [] %}{{ '<call>' + call.function.name + call.function.arguments + '</call>' }}{% endfor %}
{%- endfor %}
"""
