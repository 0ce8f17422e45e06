"""A leader and a standby on one journal."""

from dataclasses import dataclass

from stratagem.client.sdk.blocking import Client
from stratagem.common.base.errors import StandbyError, UnavailableError
from tests.crash.hands import Hands, Process
from tests.crash.rig import until


@dataclass(slots=True)
class Pair:
    """A leader, a standby, and two workers that know both. The roles change from test to test."""

    hands: Hands
    journal: str
    leader: Process
    standby: Process
    of_leader: str
    of_standby: str

    @property
    def both(self) -> str:
        return f"{self.of_leader},{self.of_standby}"

    def settle(self) -> None:
        """Somebody leads, and somebody stands by."""
        if self.leader.has_ended:
            assert self.standby.address == self.of_standby
            self.leader, self.standby = self.standby, self.leader
            self.of_leader, self.of_standby = self.of_standby, self.of_leader
        if self.standby.has_ended:
            self.standby = self.hands.coordinator(self.standby.name, listen=self.of_standby)
        until(self._stands_by, "there is a standby")

    def _stands_by(self) -> bool:
        with Client(self.of_standby) as client:
            try:
                client.runs()
            except StandbyError as error:
                return error.leader == self.of_leader
            except UnavailableError:
                return False
        return False
