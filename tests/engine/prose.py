"""A text of over 1,100 tokens in plain English, for programs that measure what a model says."""

from tests.engine.agreement import TEXT

PROSE = (
    TEXT
    + """

The schoolteacher kept a copy of every letter. After her death the copies lay in a drawer of the town hall, tied with a
green ribbon, until a clerk who was looking for tax records found them in 1951. He read them in one night and wrote a
short article for the newspaper, in which he asked why the bridge had a plate with the name of the engineer and none
with hers. The council discussed it for two years. Some members said that she had only measured what she was asked to
measure. Others answered that the engineer had asked for twelve depths, and that she had sent him sixty, with the dates,
the weather and the height of the water on each day. In the end a second plate was made. It is smaller than the first,
and it hangs on the left bank, where the ground is sand.

Measuring a river is slow work. The bed moves with every flood, so a depth is only true for a season. A modern survey
boat sends pulses of sound to the bottom and counts the time until the echo returns. Sound travels through fresh water
at about 1,480 metres a second, a little faster when the water is warm. If an echo comes back after 8 thousandths of a
second, the sound has gone down and up again, so the bottom is about 5.9 metres away. The boat repeats this fifty times
a second and knows its own position to within two centimetres. From a day of such lines a computer draws a map in which
every boulder can be seen, and the wrecks of two ferries that nobody had remembered. Yet the map has the same enemy as
the stone on the rope: a week of heavy rain, and it shows a river that no longer exists.

The mill was never built again. Its owner, a man called Anders Holm, took the money from the insurance and opened a shop
for bicycles next to the station. He sold eleven bicycles in the first year and two hundred in the fifth, because the
road over the bridge had been paved and was flat for thirty kilometres. His daughter raced. She won the regional
championship in 1936 on a machine that her father had put together from three others, and she kept the medal in a
drawer, under the spoons, since she thought it boastful to hang it on a wall. When reporters asked her many years later
what she remembered of the race, she said that it had rained, that her front tyre had been too soft, and that on the
last hill she had counted the telegraph poles, because a person who counts has no time to be tired.

There is a recipe that the town claims as its own, though the next town claims it as well. For six people you need a
kilogram of potatoes, two onions, half a litre of cream, a jar of small salted fish and some breadcrumbs. Cut the
potatoes into thin sticks and fry the onions until they are soft but not brown. Put both into a dish in layers with the
fish between them, pour the cream over it, cover it with breadcrumbs and a little butter, and bake it for an hour in an
oven that is hot but not very hot. The dispute between the towns is about the onions. In one of them they are fried; in
the other one they go into the dish raw, and people there will tell you that this is the difference between cooking and
impatience. Visitors are advised to praise whatever they are given and to ask for a second helping.

In spring the ice breaks, and for one evening the whole town stands on the bridge to listen. First there is a sound like
a door that is opened in a distant house. Then a crack runs from bank to bank, faster than anybody can turn his head,
and the plates begin to move. Children bet on which pier will be struck first. The old people do not bet. They look at
the marks that have been cut into the stone of the third pier, one for every flood, with the year beside it, and they
compare them with the water, and when it is dark and the water is still below the mark of 1923, they go home."""
)
