// Two tabs may add to one conversation: both keep all turns.

/**
 * Add to a conversation what another tab has stored of it. What is shown stays. Return whether the other tab lacks
 * something that this one has.
 */
export function merge(mine, theirs) {
  const own = new Map(mine.turns.map((turn) => [turn.id, turn]));
  const places = []; // of their turns among mine
  let isBehind = false;
  for (const turn of theirs.turns) {
    const same = own.get(turn.id);
    const parent = places[turn.parent] ?? -1;
    places.push(same ? mine.turns.indexOf(same) : mine.turns.push({ ...turn, parent }) - 1);
    if (same && turn.changed > same.changed) Object.assign(same, turn, { parent });
    if (same && turn.changed < same.changed) isBehind = true;
    own.delete(turn.id);
  }
  mine.name ||= theirs.name;
  mine.changed = Math.max(mine.changed, theirs.changed);
  return isBehind || own.size > 0;
}
