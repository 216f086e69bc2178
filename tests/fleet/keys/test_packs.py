"""What the tokens of a worker and of the read-only commands do with packs."""

import pytest

from imagefleet import errors
from imagefleet.records import reader
from imagefleet.storage.azure.roles import ROLES
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from stored_images import member, pack_name, store_pack
from tokens import by_tokens


async def test_a_thief_reads_packs_whose_names_it_knows_and_lists_or_changes_none(
    azurite_settings: StorageSettings,
):
    async with open_storage(azurite_settings) as owner:
        await store_pack(owner, [member("a")])
        before = await owner.packs.read(pack_name())
    async with open_storage(by_tokens(azurite_settings, ROLES["worker"])) as thief:
        packs = thief.packs
        assert await packs.read(pack_name()) == before
        assert await packs.create(pack_name(1), b"x", "application/x-tar", {})
        assert not await packs.create(pack_name(), b"x", "application/x-tar", {})

        with pytest.raises(errors.SetupError, match="list"):
            await anext(packs.names())
        with pytest.raises(errors.SetupError):
            await packs.replace(pack_name(), b"x", "application/x-tar", "0x1")
        with pytest.raises(errors.SetupError):
            await packs.append(pack_name(2), b"x", 0)
        assert not await packs.delete(pack_name())

    async with open_storage(azurite_settings) as owner:
        assert await owner.packs.read(pack_name()) == before


@pytest.mark.parametrize("role", ["monitor", "operator"])
async def test_who_reads_results_reads_packs(
    azurite_settings: StorageSettings, role: str
):
    async with open_storage(azurite_settings) as owner:
        (record,) = await store_pack(owner, [member("a")], recorded=False)
        await store_pack(owner, [member("b")], name=pack_name(1))
    async with open_storage(by_tokens(azurite_settings, ROLES[role])) as reading:
        found = {each.id async for each in reader.images(reading, "spring")}
        assert found == {"a", "b"}
        assert (await reading.packs.read_part(pack_name(), 0, 8)) is not None
    assert record.pack == pack_name()
