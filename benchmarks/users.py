"""The requests of two invented users, each of whom asks for the same kind of text again and again."""

import ast
from itertools import product
from pathlib import Path

import numpy as np

_SOURCES = Path(__file__).parents[1] / "spec_local"
_LINES = range(9, 26)  # of the functions to review

_RECIPIENTS = (
    *("Autohaus Brenner in Ulm", "Bäckerei Lindauer in Passau", "die Stadtwerke Neuburg"),
    *("Möbelhaus Kessler in Celle", "Praxis Dr. Wendt in Jena", "Druckerei Aumann in Kiel"),
    *("Hotel Seeblick in Lindau", "Gärtnerei Holzapfel in Trier", "Spedition Rademacher in Hamm"),
    "Verlag Sonnleitner in Graz",
)
_MATTERS = (
    "eine Mahnung. Rechnung {number} vom {day}. März über {sum} Euro ist trotz Erinnerung nicht bezahlt; "
    "neue Frist: zehn Tage.",
    "eine Reklamation. Die Lieferung {number} kam am {day}. Mai mit {count} beschädigten Teilen an; wir "
    "bitten um Ersatz.",
    "eine Bitte um ein Angebot. Wir brauchen {count} Exemplare bis zum {day}. Juni und möchten Preis und "
    "Lieferzeit wissen.",
    "eine Terminverschiebung. Der Termin am {day}. April muss wegen Krankheit entfallen; Vorschlag: eine "
    "Woche später, gleiche Uhrzeit.",
    "eine Kündigung. Der Wartungsvertrag {number} soll zum {day}. Dezember enden; wir bitten um eine "
    "Bestätigung.",
    "eine Auftragsbestätigung. Bestellung {number}: {count} Stück zu {sum} Euro, Lieferung am {day}. Juli "
    "frei Haus.",
    "eine Entschuldigung. Unsere Lieferung {number} verspätet sich um {count} Tage, weil ein Zulieferer "
    "ausfällt; Nachlass: drei Prozent.",
    "eine Einladung. Wir feiern am {day}. September unser {count}-jähriges Bestehen mit einem Rundgang und "
    "Mittagessen.",
    "eine Preiserhöhung. Ab dem {day}. Januar steigen unsere Preise um {count} Prozent, weil Energie teurer "
    "wurde.",
    "einen Dank. Vielen Dank für die schnelle Hilfe am {day}. Februar beim Auftrag {number}; wir empfehlen "
    "Sie gern weiter.",
    "eine Absage. Ihr Angebot {number} über {sum} Euro haben wir geprüft, uns aber für einen anderen "
    "Anbieter entschieden.",
    "eine Nachfrage. Auf unser Schreiben vom {day}. Oktober zur Sache {number} haben wir noch keine Antwort "
    "erhalten.",
)
_SENDERS = ("Petra Vogt", "Jonas Reiter")


def letters() -> list[str]:
    """Business letters in German: ten recipients, twelve matters, other numbers and dates in each."""
    found = []
    for i, (recipient, matter) in enumerate(product(_RECIPIENTS, _MATTERS)):
        numbers = {"number": 4100 + 37 * i, "day": 1 + 7 * i % 27, "sum": 180 + 53 * i % 2400}
        text = matter.format(**numbers, count=2 + 11 * i % 40)
        sender = f"{_SENDERS[i % 2]}, Werkstatt Vogt & Reiter, Regensburg"
        found.append(f"Schreibe einen kurzen Geschäftsbrief an {recipient}: {text} Absender: {sender}.")
    return _shuffled(found)


def reviews() -> list[str]:
    """Reviews of functions of this project: 9 to 25 lines each, from all modules."""
    found = []
    for path in sorted(_SOURCES.rglob("*.py")):
        source = path.read_text()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and node.end_lineno:
                code = ast.get_source_segment(source, node)
                if code and node.end_lineno - node.lineno + 1 in _LINES:
                    found.append(
                        f"Review this function of our project ({path.relative_to(_SOURCES.parent)}). Name at "
                        "most three weaknesses, each with the line that it concerns, and show an improved "
                        f"version of the function.\n\n```python\n{code}\n```"
                    )
    return _shuffled(found)


def _shuffled(requests: list[str]) -> list[str]:
    return [requests[i] for i in np.random.default_rng(0).permutation(len(requests))]


USERS = {"letters": letters, "reviews": reviews}
