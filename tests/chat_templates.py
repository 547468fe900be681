"""Chat templates of all the kinds that models come with, for the control tokens of tiny models."""

from spec_local.llama.model import Model
from spec_local.llama.tiny import CHAT_TEMPLATE

TEMPLATES = {
    "chatml": CHAT_TEMPLATE,
    "default system": (
        "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
        + CHAT_TEMPLATE
    ),
    # Gemma: the system message precedes the first question, messages are stripped, roles must alternate.
    "gemma": (
        "{%- set system = '' -%}{%- if messages[0]['role'] == 'system' -%}"
        "{%- set system = messages[0]['content'] + '\n\n' -%}{%- set messages = messages[1:] -%}{%- endif -%}"
        "{%- for message in messages -%}"
        "{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
        "{{ raise_exception('roles must alternate') }}{%- endif -%}"
        "{{ '<|im_start|>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}"
        "{{ system if loop.first else '' }}"
        "{{ message['content'] | trim }}{{ '<|im_end|>\n' }}"
        "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>model\n' }}{%- endif -%}"
    ),
    # Qwen3 and DeepSeek: reasoning is removed from all answers except a last message.
    "reasoning": (
        "{% for message in messages %}{% set text = message['content'] %}"
        "{% if message['role'] == 'assistant' and not loop.last %}"
        "{% set text = text.split('~')[-1] %}{% endif %}"
        "{{ '<|im_start|>' + message['role'] + '\n' + text + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    # Tokens could merge across the ends of messages.
    "spaces": (
        "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + ' ' }}{% endfor %}"
        "assistant: "
    ),
}
"""Templates in which the tokens of a conversation can be followed from turn to turn."""

MORE_TEMPLATES = {
    # Llama 2: the system message is inside the first question.
    "instruction": (
        "{% set first = namespace(prefix='') %}{% for m in messages %}{% if m.role == 'system' %}"
        "{% set first.prefix = '<<SYS>>\n' ~ m.content ~ '\n<</SYS>>\n\n' %}{% elif m.role == 'user' %}"
        "{{ bos_token ~ '[INST] ' ~ (first.prefix ~ m.content).strip() ~ ' [/INST]' }}"
        "{% set first.prefix = '' %}{% else %}{{ ' ' ~ m.content.strip() ~ ' ' ~ eos_token }}{% endif %}"
        "{% endfor %}"
    ),
    # Llama 3: the text is put together before it is printed.
    "assembled": (
        "{% set start, end = '<|im_start|>', '<|im_end|>' %}{% for message in messages %}"
        "{% set content = start + message['role'] + end + '\n\n' + message['content'] | trim + end %}"
        "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
        "{% endfor %}{{ start + 'assistant' + end + '\n\n' }}"
    ),
    # Phi and GLM: the names of the control tokens are made from roles.
    "names from roles": (
        "{% for message in messages %}{% set which = 'start' if message.role == 'user' else 'end' %}"
        "{{ '<|im_' + which + '|>' + message.content }}<|im_{{ which }}|>{% endfor %}{{ '<|im_start|>' }}"
    ),
    # Gemma 4: a macro removes reasoning and joins what was around it.
    "removed and joined": (
        "{% macro shown(text) %}{% set ns = namespace(result='') %}{% for part in text.split('~') %}"
        "{% set ns.result = ns.result + part.split('^')[0] %}{% endfor %}{{ ns.result | trim }}{% endmacro %}"
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{{ shown(m.content) + '<|im_end|>\n' }}"
        "{% endfor %}<|im_start|>assistant\n"
    ),
    "formats": (
        "{% for m in messages %}{{ '<|im_start|>%s\n%s<|im_end|>' % (m.role, m.content) }}"
        "{{ '<|im_start|>{}\n{}<|im_end|>'.format(m.role, m.content | trim) }}"
        "{{ '<|im_start|>%s<|im_end|>' | format(m.content | upper) }}{% endfor %}"
    ),
    "lists": (
        "{% for m in messages %}{{ ['<|im_start|>', m.role, '\n', m.content, '<|im_end|>'] | join }}"
        "{{ '\n'.join(['<|im_start|>'] + m.content.splitlines()) }}{{ m | tojson }}{% endfor %}"
        "{{ messages | map(attribute='content') | join('<|im_end|>') }}"
    ),
    "blocks": (
        "{% for m in messages %}{% set text %}<|im_start|>{{ m.content }}<|im_end|>{% endset %}"
        "{{ text | trim }}{% filter trim %}<|im_start|>{{ m.content[1:] }}{{ m.content[:1] }}{% endfilter %}"
        "{% generation %}{{ m.content | replace('~', '') }}<|im_end|>{% endgeneration %}{% endfor %}"
    ),
    "characters": (
        "{% for m in messages %}<|im_start|>{% for c in m.content %}{% if c != '~' %}{{ c }}{% endif %}"
        "{% endfor %}{{ m.content | first }}{{ m.content | reverse }}<|im_end|>{% endfor %}"
    ),
    # Contents that follow each other, and marks that they could complete.
    "nothing between": "{% for m in messages %}{{ m.content }}{% endfor %}<|im_end|><|im_{{ '' }}",
    "half a mark": "{% for m in messages %}<{{ m.content }}>{{ '<|im_start' + m.content }}{% endfor %}",
    "without a beginning": "{{ messages[0].content }}",
}
"""Other ways in which templates handle text."""

THINKING_TEMPLATES = {
    # Qwen3: the model writes both markers; reasoning is shown in an answer to the last question only.
    "both markers": (
        "{% set last = namespace(question=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set last.question = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}{% set text, thought = m.content, m.reasoning_content or '' %}"
        "{% if m.role == 'assistant' and '</think>' in text and not thought %}"
        "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
        "{{ '<|im_start|>' + m.role + '\n' }}{% if loop.index0 > last.question %}"
        "{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}{{ text + '<|im_end|>\n' }}{% endfor %}"
        "{{ '<|im_start|>assistant\n' }}"
    ),
    # DeepSeek R1 and Qwen3.5: the prompt ends with the first marker.
    "opened": (
        "{% for m in messages %}{% set text = m.content.split('</think>')[-1] %}"
        "{{ '<|im_start|>' + m.role + '\n' + text + '<|im_end|>\n' }}{% endfor %}"
        "{{ '<|im_start|>assistant\n<think>\n' }}"
    ),
    # gpt-oss: content with markers is an error.
    "channels": (
        "{% for m in messages %}{% if '<|channel|>' in m.content %}"
        "{{ raise_exception('markers in ' + m.role) }}{% endif %}"
        "{% if m.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
        "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content }}{% endif %}{{ '<|end|>' }}"
        "{% endfor %}{{ '<|start|>assistant' }}"
    ),
    # Some templates show the reasoning of all answers.
    "kept": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.reasoning_content %}"
        "{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}"
        "{{ m.content + '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' }}"
    ),
}
"""Templates of models that think before they answer."""

TOOL_TEMPLATES = {
    # Qwen2.5 and Hermes: tools in the system message, results in messages of the user.
    "Hermes": (
        "{% if tools %}<|im_start|>system\nTools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n"
        "Write <tool_call>\n{...}\n</tool_call>.<|im_end|>\n{% endif %}"
        "{% for m in messages %}{% if m.role == 'tool' %}"
        "{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
        "{% elif m.tool_calls %}{{ '<|im_start|>assistant' }}"
        "{% if m.content %}{{ '\n' + m.content }}{% endif %}"
        "{% for call in m.tool_calls %}{% set call = call.function %}"
        '{{ \'\n<tool_call>\n{"name": "\' + call.name + \'", "arguments": \' }}'
        "{{ call.arguments | tojson }}"
        "{{ '}\n</tool_call>' }}{% endfor %}<|im_end|>\n"
        "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{{ '<|im_start|>assistant\n' }}"
    ),
    # Llama 3: one call, in an environment of its own.
    "Llama 3": (
        "{{ '<|im_start|>system\n' }}{% if tools is not none %}"
        '{{ \'Respond in the format {"name": function name, "parameters": dictionary}.\' }}'
        "{% for t in tools %}{{ t | tojson(indent=4) }}\n{% endfor %}{% endif %}<|im_end|>"
        "{% for m in messages %}{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
        "{{ raise_exception('one call only') }}{% endif %}{% set call = m.tool_calls[0].function %}"
        '{{ \'<|im_start|>assistant\n{"name": "\' + call.name + \'", "parameters": \' }}'
        "{{ call.arguments | tojson + '}<|im_end|>' }}"
        "{% elif m.role == 'tool' %}{{ '<|im_start|>ipython\n' }}"
        "{% if m.content is mapping %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}<|im_end|>"
        "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content | trim + '<|im_end|>' }}{% endif %}"
        "{% endfor %}{{ '<|im_start|>assistant\n' }}"
    ),
    # Mistral: tools before the last question, ids of nine characters, texts put together by hand.
    "Mistral": (
        "{% for m in messages %}{% if m.role == 'user' %}{% if tools is not none %}"
        "{{ '<|im_start|>[' }}{% for tool in tools %}{% for key, value in tool.function.items() %}"
        "{% if value is string %}{{ '\"' + key + '\": \"' + value + '\", ' }}"
        "{% else %}{{ '\"' + key + '\": ' + value | tojson }}{% endif %}{% endfor %}{% endfor %}"
        "]<|im_end|>{% endif %}{{ '<|im_start|>' + m.content + '<|im_end|>' }}"
        "{% elif m.tool_calls is defined %}{{ '[TOOL_CALLS][' }}{% for call in m.tool_calls %}"
        "{% if call.id | length != 9 %}{{ raise_exception('the id has not 9 characters') }}{% endif %}"
        "{% set out = call.function | tojson %}{{ out[:-1] + ', \"id\": \"' + call.id + '\"}' }}"
        "{% if not loop.last %}, {% endif %}{% endfor %}{{ ']</s>' }}"
        "{% elif m.role == 'tool' %}{{ '<|im_start|>{\"content\": ' + m.content | string }}"
        "{{ ', \"call_id\": \"' + m.tool_call_id + '\"}<|im_end|>' }}"
        "{% else %}{{ m.content + '</s>' }}{% endif %}{% endfor %}"
    ),
    # Qwen3-Coder: schemas and calls in tags.
    "Qwen3-Coder": (
        "{% for t in tools or [] %}{% set f = t.function %}{{ '<|im_start|><name>' ~ f.name }}"
        "{% for name, fields in f.parameters.properties | items %}{{ '\n<parameter>' ~ name ~ fields.type }}"
        "{% for key in fields.keys() | reject('in', ['type']) %}"
        "{{ '<' ~ key ~ '>' ~ (fields[key] | tojson | safe) }}"
        "{% endfor %}{% endfor %}<|im_end|>{% endfor %}"
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
        "{% for call in m.tool_calls or [] %}{{ '\n<tool_call>\n<function=' + call.function.name + '>\n' }}"
        "{% for name, value in call.function.arguments | items %}{{ '<parameter=' + name + '>\n' }}"
        "{{ value | tojson | safe if value is mapping or (value is sequence and value is not string) "
        "else value | string }}{{ '\n</parameter>\n' }}{% endfor %}</function>\n</tool_call>{% endfor %}"
        "<|im_end|>{% endfor %}{{ '<|im_start|>assistant\n' }}"
    ),
    # gpt-oss: the header of a message names the tool.
    "gpt-oss": (
        "{% for t in tools or [] %}{{ '<|start|>developer<|message|>// ' + t.function.description }}"
        "{{ '\ntype ' + t.function.name + '<|end|>' }}{% endfor %}"
        "{% for m in messages %}{% if '<|channel|>' in m.content %}"
        "{{ raise_exception('markers') }}{% endif %}"
        "{% if m.role == 'tool' %}{{ '<|start|>functions.' + m.name }}"
        "{{ ' to=assistant<|channel|>commentary<|message|>' + m.content | tojson + '<|end|>' }}"
        "{% elif m.tool_calls %}{% if m.reasoning_content %}"
        "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.reasoning_content + '<|end|>' }}"
        "{% endif %}"
        "{% set call = m.tool_calls[0].function %}{{ '<|start|>assistant to=functions.' + call.name }}"
        "{{ '<|channel|>commentary json<|message|>' + call.arguments | tojson + '<|call|>' }}"
        "{% elif m.role == 'assistant' %}"
        "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}"
        "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}"
        "{% endfor %}{{ '<|start|>assistant' }}"
    ),
    # LFM2: it writes no calls of earlier answers.
    "LFM2": (
        "{% if tools %}{{ '<|im_start|>system\nList of tools: <|tool_list_start|>[' }}{% for t in tools %}"
        "{{ t | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}"
        "{{ ']<|tool_list_end|><|im_end|>\n' }}{% endif %}{% for m in messages %}"
        "{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'tool' %}"
        "{{ '<|tool_response_start|>' + m.content + '<|tool_response_end|>' }}"
        "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{{ '<|im_start|>assistant\n' }}"
    ),
    # DeepSeek: arguments as text. Others print whole tools, or the names of their parameters.
    "text": (
        "{% if tools %}{{ tools }}{{ '<|im_start|>' ~ tools[0] ~ '<|im_end|>' }}"
        "{{ tools[0].function.parameters.properties.keys() | join('<|im_end|>') }}{% endif %}"
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
        "{% for call in m.tool_calls or [] %}{{ '<tool_call>' + call.function.name }}"
        "{{ '```' + call.function.arguments + '```' }}{% endfor %}{{ '<|im_end|>' ~ (m.name or '') }}"
        "{% endfor %}{{ '<|im_start|>' }}"
    ),
}
"""Templates of models that call tools."""


STRICT_TEMPLATES = {
    # Qwen3.5: one system message, at the start, and a question.
    "Qwen3.5": (
        "{% if not messages %}{{ raise_exception('No messages provided.') }}{% endif %}"
        "{% set found = namespace(question=false) %}{% for m in messages %}"
        "{% if m.role == 'user' %}{% set found.question = true %}{% endif %}{% endfor %}"
        "{% if not found.question %}{{ raise_exception('No user query found in messages.') }}{% endif %}"
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
        "{{ '<|im_start|>' + m.role + '\n' + (m.content | trim) }}"
        "{% for call in m.tool_calls or [] %}{{ '\n<tool_call>\n<function=' + call.function.name + '>' }}"
        "{{ call.function.arguments | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{{ '<|im_start|>assistant\n<think>\n' }}"
        "{% if enable_thinking is defined and not enable_thinking %}{{ '\n</think>\n\n' }}{% endif %}"
    ),
    # Qwen3: the model opens its reasoning, unless the template writes that there is none.
    "Qwen3": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{{ '<|im_start|>assistant\n' }}{% if enable_thinking is defined and not enable_thinking %}"
        "{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    ),
    # Gemma 2: no system message at all.
    "Gemma 2": (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "{{ '<start_of_turn>' + m.role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{{ '<start_of_turn>model\n' }}"
    ),
    # Mistral: roles alternate, but for calls and results; an answer without text is an error.
    "Mistral": (
        "{% set ns = namespace(i=0) %}{% for m in messages %}"
        "{% if not (m.role == 'tool' or m.tool_calls or (m.role == 'system' and loop.first)) %}"
        "{% if (m.role == 'user') != (ns.i % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
        "{% set ns.i = ns.i + 1 %}{% endif %}{% endfor %}"
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
        "{% for m in messages %}{% if m.role == 'assistant' and not (m.content or m.tool_calls) %}"
        "{{ raise_exception('An answer must have content or calls') }}{% endif %}"
        "{{ '[' + m.role + ']' + m.content }}{% for call in m.tool_calls or [] %}"
        "{{ '[CALL]' + call.function.name + call.function.arguments | tojson }}{% endfor %}{% endfor %}"
    ),
    # gpt-oss: only the first message may be the system's; later ones are lost without an error.
    "loses": (
        "{% if messages[0].role == 'system' %}{{ '<|start|>developer' + messages[0].content }}{% endif %}"
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<|start|>user' + m.content }}"
        "{% elif m.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
        "{% endif %}{% endfor %}<|start|>assistant"
    ),
}
"""Templates that accept roles in a certain order only."""


class StandInVocabulary:
    """A vocabulary without control tokens."""

    bos = eos = -1
    add_bos = False

    def piece(self, token, special=False):
        """The bytes of a token."""
        raise IndexError(token)


class StandIn(Model):
    """A model with nothing but what a template needs."""

    def __init__(self, **facts):
        self.__dict__.update(facts)


def own_names(reply, pattern):
    """The names of control tokens that a template wrote itself, in order; they may overlap.

    reply: what `spec_local.chat.jinja_renderer.render` returned. pattern: matches a name.
    """
    text = reply["text"]
    is_content = [False] * len(text)
    for start, end in reply["content"]:
        is_content[start:end] = [True] * (end - start)
    found = (pattern.match(text, i) for i in range(len(text)))
    return [match[0] for match in found if match and not any(is_content[slice(*match.span())])]
