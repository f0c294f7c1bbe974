"""The common words that scenes are printed with."""

from __future__ import annotations

_TEXT = """
about above after again agree ahead alarm album alert alive alone along angle animal apple arrow
artist autumn awake baby back bag baker ball band bank barn basket beach bean bear bed bell bench
berry bike bird blanket blind block board boat body book boot border bottle bowl box bread break
brick bridge bright bring broom brother bucket build bus bush butter button cabin cable cake camel
camera camp candle candy card carpet carrot castle cat chain chair chalk cheese cherry chest child
city class clay clean clock cloud coat coffee coin cold corner cotton count cow crab cream crown cup
curtain dance dark day deep desk dinner doctor dog door dream dress drink drum duck dust eagle early
earth east easy edge eight elbow empty engine enter evening exit face farm farmer fast father
feather fence field finger fire fish flag flame flat floor flour flower fly fog food forest fork fox
frame fresh friend frog fruit garden gate giant gift glass glove goat gold good goose grape grass
ground guard guitar hair hammer hand happy harbor hat head heavy hello help hill home honey horse
hotel hour house ice ink iron island jacket jam jar jelly jewel judge juice jump keep kettle key
kind king kitchen kite knee knife lake lamp land large laugh leaf learn lemon letter light lion lock
long lucky lunch machine magic map market mask meadow meat melon middle milk minute mirror money
monkey moon morning mother motor mountain mouse mouth music nail name narrow needle nest night nine
noise north nose number nurse ocean office oil old olive onion open orbit oven owl page paint palace
paper park party path peach pear pen pencil pepper piano picnic pillow pilot pine pink pipe planet
plate play pocket pond potato powder press prince pull pump puppy purse push queen quick quiet
rabbit radio rain ready rice ride right ring river road robot rock roof room rope rose round salad
salt sand school seat seed seven shadow sheep shelf ship shirt shoe shop short silver simple sister
sky sleep slow small smile snow soap sock soft song soup south space spoon spring stable stamp stand
station stone stop storm story street sugar summer sun sweet swim table tail tall tea teacher tent
thank three ticket tiger time toast today tomato tooth tower town toy track train tree truck tunnel
turtle uncle under valley van village violin visit voice wagon walk wall warm watch water wave week
west wet whale wheel white wide wind window winter wolf wonder wood work world yard year yellow
young zebra zero
"""

WORDS = tuple(_TEXT.split())
