-- Users call these functions in their own sessions (a TRUNCATE calls the capture function there). How the functions
-- turn values into text, and text into SQL, must not depend on those sessions' settings. Only these have no settings of
-- their own: functions that look names up in the caller's search_path; functions that readers and writers call for each
-- query or row, which handle numbers; and trusts and standing, which our own sessions call in each batch, with oids.
-- Functions that a later migration creates or replaces pin the same settings.
DO $$
DECLARE
    f regprocedure;
    pin record;
BEGIN
    FOR f IN SELECT p.oid FROM pg_proc p
              WHERE p.pronamespace = 'roir'::regnamespace AND p.prokind = 'f'
                AND p.proname NOT IN ('published', 'is_doubtful', 'is_mine', 'is_in_mode', 'trusts', 'standing')
                AND EXISTS (SELECT FROM unnest(p.proconfig) c WHERE c LIKE 'search_path=%')
    LOOP
        FOR pin IN SELECT * FROM (VALUES
            ('datestyle', 'ISO, YMD'), ('timezone', 'UTC'), ('intervalstyle', 'postgres'), ('extra_float_digits', '3'),
            ('bytea_output', 'hex'), ('xmloption', 'content'), ('lc_monetary', 'C'), ('array_nulls', 'on'),
            ('standard_conforming_strings', 'on'), ('quote_all_identifiers', 'off'), ('transform_null_equals', 'off'),
            -- The genetic optimizer fails to plan some of our queries if it is set to small pools.
            ('geqo', 'off'),
            ('restrict_nonsystem_relation_kind', '')) AS pins (name, value)
            -- The last setting exists only in later minor versions.
            WHERE current_setting(pins.name, true) IS NOT NULL
        LOOP
            EXECUTE format('ALTER FUNCTION %s SET %s TO %s', f, pin.name,
                           CASE WHEN pin.name = 'datestyle' THEN pin.value ELSE quote_literal(pin.value) END);
        END LOOP;
    END LOOP;
END $$;
